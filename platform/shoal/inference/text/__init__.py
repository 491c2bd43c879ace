"""From tokens to text, piece by piece, and where a stop string ends it."""

from shoal.inference.text.choice_text import ChoiceText, TextDelta
from shoal.inference.text.detokenizer import Detokenizer, TokenTexts
from shoal.inference.text.stop_strings import StopStrings
from shoal.inference.text.token_names import TokenName, TokenNames

__all__ = [
    "ChoiceText",
    "Detokenizer",
    "StopStrings",
    "TextDelta",
    "TokenName",
    "TokenNames",
    "TokenTexts",
]
