"""Plans of other methods: shown with every result, and starts of the search."""
