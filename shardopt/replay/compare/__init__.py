"""Models and their replays side by side, and the replays that laws are fitted on."""
