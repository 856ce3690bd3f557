"""Values and small tools that every other package uses. Imports no other package."""
