"""What a client wants to see in a response besides the text."""

from dataclasses import dataclass

from octavo.entrypoints.openai.logprobs import NameToken, name_by_id, name_by_text


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyShape:
    """Read from a request's fields; a form decides where the things asked for stand."""

    num_logprobs: int | None = None
    """Alternatives to report at each token; None reports no log-probabilities."""
    has_echo: bool = False
    has_prompt_logprobs: bool = False
    has_prompt_text: bool = False
    """In chats alone: what the template has made of the messages."""
    has_token_ids: bool = False
    names_ids: bool = False
    """Whether tokens are called by their ids in the place of their texts."""

    @property
    def name_token(self) -> NameToken:
        """Return how tokens are called."""
        return name_by_id if self.names_ids else name_by_text
