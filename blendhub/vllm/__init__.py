"""The adapter: BlendHub inside stock vLLM. Nothing of vLLM or torch is imported until vLLM asks for the connector."""
