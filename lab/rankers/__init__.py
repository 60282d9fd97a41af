"""Real models beside the DLRM, built from an `Architecture` and the tables of a workload.

`ranker` joins embedding modules and a body; bodies, one file a family, use TorchRec's own modules
where there are some.
"""
