"""Text and chats to token ids, and back."""

from shoal.data.tokenizer.byte_level import ByteTokenizer
from shoal.data.tokenizer.hugging_face import HFTokenizer
from shoal.data.tokenizer.interface import ChatTokens, Message, Tokenizer
from shoal.data.tokenizer.loading import check_vocabulary, load_tokenizer, tokenizer_name

__all__ = [
    "ByteTokenizer",
    "ChatTokens",
    "HFTokenizer",
    "Message",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "tokenizer_name",
]
