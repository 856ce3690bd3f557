"""The live screen: visits the ranks, has a doctor on call."""
