"""A small trained model that answers questions about documents, and the task that it was trained on."""
