"""What other planners would choose: TorchRec's, and those of other papers."""
