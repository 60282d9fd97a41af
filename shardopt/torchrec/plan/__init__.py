"""Between shardopt's plans and TorchRec's, and what TorchRec can run of them."""
