"""A small trained model that answers questions about documents, and the task that it was trained on."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The one that ships."""
