"""Plans in TorchRec's form: conversion both ways, and which plans TorchRec can run.

Imports `predictor` only. The order of the rooms is plan <- training <- module <- planning.
"""
