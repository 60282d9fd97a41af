"""The README's picture, TorchRec's own tests with our planner, and every command of the wheel.

Run each as ``python -m lab NAME``; ``--help`` lists its arguments.
"""
