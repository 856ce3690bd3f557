"""A job of several hosts: one monitor leads and gives the verdict, the others are its deputies."""
