"""A RAG application as LangChain's guide builds it: what a search among split texts finds stands in the system text."""

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from langchain_text_splitters import RecursiveCharacterTextSplitter

from research.clients.rag import ANSWER_TOKENS, Application, Reply, main, vector


class Words:
    """LangChain's interface of embeddings."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return vector(text)


def application(url: str, model: str, texts: list[str]) -> Application:
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=200)
    store = InMemoryVectorStore(Words())
    store.add_documents(splitter.split_documents([Document(text) for text in texts]))

    def with_context(request: Any) -> str:
        found = store.similarity_search(request.state["messages"][-1].text)
        context = "\n\n".join(document.page_content for document in found)
        return f"You are a helpful assistant. Use the following context in your response:\n\n{context}"

    llm = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=ANSWER_TOKENS, max_retries=0)
    agent: Any = create_agent(llm, tools=[], middleware=[dynamic_prompt(with_context)])

    def answer(question: str) -> Reply:
        message = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"][-1]
        usage = message.usage_metadata
        return Reply(message.text, usage["input_tokens"], usage["input_token_details"]["cache_read"])

    return answer


if __name__ == "__main__":
    main(application)
