"""What other methods would choose: shown with every result, and starts of the search."""
