"""Traced steps predicted from their structure: a graph of what each rank issued, run again."""
