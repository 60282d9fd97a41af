"""What a generated benchmark runs on; copied beside it, and needs torch alone."""
