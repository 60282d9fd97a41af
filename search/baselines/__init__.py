"""What other planners would choose: TorchRec's, and those of other papers.

`starting_plans` are shown with every result and start the search; the planners of papers
(`planner` says what one is) are for comparisons. May import everything below `search.solve`.
"""
