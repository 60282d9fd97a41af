"""The command line: flags, console and exit codes. No command imports another."""
