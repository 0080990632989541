"""Grammars, as llama-cpp-python names them."""

from __future__ import annotations

from .._llama_types import LlamaGrammar
from ._absent import absent

__all__ = ["JSON_GBNF", "LLAMA_GRAMMAR_DEFAULT_ROOT", "LlamaGrammar"]

#: The rule with which a grammar begins.
LLAMA_GRAMMAR_DEFAULT_ROOT = "root"

#: A grammar of JSON objects.
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( pair ( "," ws pair )* )? "}" ws
pair   ::= string ":" ws value ws
array  ::= "[" ws ( value ws ( "," ws value ws )* )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" hex hex hex hex ) )* "\""
hex    ::= [0-9a-fA-F]
number ::= "-"? ( "0" | [1-9] [0-9]* ) ( "." [0-9]+ )? ( [eE] [-+]? [0-9]+ )?
ws     ::= [ \t\n]{0,8}
"""

_CONVERTER = "a schema needs no conversion: LlamaGrammar.from_json_schema"
_EXAMPLE = "example grammars are not part of this package"

__getattr__ = absent(
    __name__,
    {
        "json_schema_to_gbnf": _CONVERTER,
        "SchemaConverter": _CONVERTER,
        **dict.fromkeys(("ARITHMETIC_GBNF", "C_GBNF", "CHESS_GBNF", "JAPANESE_GBNF", "JSON_ARR_GBNF", "LIST_GBNF"), _EXAMPLE),
    },
)
