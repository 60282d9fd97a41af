"""The constants of shipped profiles and runtimes, from rows with their source: `lab fit NAME`."""
