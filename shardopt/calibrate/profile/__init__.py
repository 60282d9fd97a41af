"""From measured rows to the file of a hardware profile. Reads rows, and measures nothing."""
