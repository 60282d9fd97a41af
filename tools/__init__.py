"""What builds the shipped profiles and the pages of the docs, and tries the wheel; not shipped.

Run each as ``python -m tools.NAME``; ``--help`` says what it needs.
"""
