"""A GPT's training step under Megatron."""
