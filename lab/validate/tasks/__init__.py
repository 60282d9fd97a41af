"""Suites on task sets: folders of random models whose plans TorchRec ran on CPU ranks.

`lab.tasks` measures and reads task sets; here their plans are predicted
(`task_prediction`), corrected for drift of the machine (`drift`) and compared.
"""
