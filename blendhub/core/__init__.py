"""The vocabulary: tokens, spans, layouts of KV, errors. Pure: no I/O, no state, nothing else of BlendHub."""
