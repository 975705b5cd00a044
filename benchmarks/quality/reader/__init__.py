"""The reader, a small trained model that answers questions about documents, and the task that it was trained on.

It was trained from random weights for about an hour on two cores, on prompts of the task's training half that grew from
two short documents to ten long ones as soon as every kind of question was answered; in a quarter of the steps every
document was computed alone. Only the checkpoint is kept: it tests mechanisms, and no selector is tuned to it.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The one that ships."""
