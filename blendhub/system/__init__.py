"""The machine around BlendHub: files, locks, processes, default paths, and the versions of vLLM that are served."""
