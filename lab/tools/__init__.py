"""What builds the shipped profiles and the pages of the docs, and tries the wheel; not shipped.

Run each as ``python -m lab NAME``; ``--help`` says what it needs. `fit_profiles` and
`profile_facts` are no programs: `derive`, `known_errors` and the tests use them.
"""
