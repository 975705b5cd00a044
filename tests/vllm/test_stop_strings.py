"""Shows where the report is lost of an answer that a string of ``stop`` ends, as docs/vllm.md says."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor


def answered_by_vllm(said: int) -> tuple[list, list]:
    """The outputs, and the requests to abort in the engine, of a token behind which a string ends the answer."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "go": 1, "halt": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words)
    processor = OutputProcessor(tokenizer, log_stats=False)
    sampling = SamplingParams(max_tokens=9, stop=["halt"])
    asked = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="r",
    )
    processor.add_request(asked, "go")
    done = processor.process_outputs([EngineCoreOutput(request_id="r", new_token_ids=[said])])
    return done.request_outputs, done.reqs_to_abort


def test_vllm_answers_before_it_ends_the_request_in_the_engine_which_has_the_report():
    ((output,), aborted) = answered_by_vllm(2)
    assert output.finished and output.outputs[0].stop_reason == "halt"
    assert output.kv_transfer_params is None and aborted == ["r"]
    ((output,), aborted) = answered_by_vllm(1)
    assert not output.finished and not aborted
