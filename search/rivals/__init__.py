"""Planners of other papers, built anew to compare with; `search.solve` uses none of them."""
