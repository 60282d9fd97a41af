"""Local descent on placed plans."""
