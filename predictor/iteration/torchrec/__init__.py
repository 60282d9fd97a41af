"""The graph of TorchRec's training iteration."""
