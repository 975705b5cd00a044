"""An engine whose attention backend makes no second builder of metadata, as one of a new kind may not."""


def fail() -> None:
    """In an engine's process."""
    from blendhub.vllm.model import engine_model

    def refuse(*given: object) -> None:
        raise ValueError("there is one workspace only")

    engine_model.AttentionMetadata = refuse
