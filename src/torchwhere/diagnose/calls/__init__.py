"""What each rank says, brought into one language."""
