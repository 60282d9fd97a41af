"""Which points a calibration measures, and in which order. Imports `predictor`, never torch."""
