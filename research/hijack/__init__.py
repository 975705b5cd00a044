"""HijackKV (arXiv 2607.19957): a stranger's prompt steers the answers to other prompts that move its KV."""
