"""A RAG application as LlamaIndex's guide builds it: an index of vectors, and its query engine."""

from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.llms.openai_like import OpenAILike

from research.clients.rag import ANSWER_TOKENS, Application, Reply, main, vector

RETRIEVED = 4


class Words(BaseEmbedding):  # type: ignore[misc]
    def _get_text_embedding(self, text: str) -> list[float]:
        return vector(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return vector(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return vector(query)


class LastResponse(BaseEventHandler):  # type: ignore[misc]
    """Keeps the server's response, which a query engine does not hand on."""

    raw: Any = None

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            self.raw = event.response.raw


def application(url: str, model: str, texts: list[str]) -> Application:
    llm = OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        context_window=4096,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        max_retries=0,
    )
    index = VectorStoreIndex.from_documents([Document(text=text) for text in texts], embed_model=Words())
    engine = index.as_query_engine(llm=llm, similarity_top_k=RETRIEVED)
    get_dispatcher().add_event_handler(last := LastResponse())

    def answer(question: str) -> Reply:
        text, usage = str(engine.query(question)), last.raw.usage
        return Reply(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)

    return answer


if __name__ == "__main__":
    main(application)
