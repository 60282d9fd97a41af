"""What builds the shipped profiles and the docs. Not in the wheel; run from a checkout."""
