"""The suite on MLPerf training of DLRM: published systems, the cases they make, the comparison."""
