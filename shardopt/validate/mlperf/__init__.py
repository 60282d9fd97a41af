"""MLPerf submissions of DLRM and DLRM-DCNv2."""
