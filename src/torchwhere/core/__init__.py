"""Values and small tools that every other package uses. Imports no other package.

Entry points: `place.Place`, `events.Event` and `errors.TorchwhereError`.
"""
