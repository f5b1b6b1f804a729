"""CodeGeeX's first line of a code document, a comment with the language, and the file suffixes of each language.

Source: CodeGeeX, codegeex/data/data_utils.py (the wording of each tag).
"""

_HASH, _SLASHES, _PERCENT, _DASHES, _SEMICOLON = "# {}", "// {}", "% {}", "-- {}", "; {}"

_LANGUAGES = [  # name, comment, suffixes
    ("Assembly", _SEMICOLON, ".asm .s .S"),
    ("C", _SLASHES, ".c .h"),
    ("C#", _SLASHES, ".cs"),
    ("C++", _SLASHES, ".cc .cpp .cxx .hh .hpp .hxx"),
    ("CSS", "/* {} */", ".css"),
    ("Clojure", _SEMICOLON, ".clj"),
    ("Cuda", _SLASHES, ".cu .cuh"),
    ("Dart", _SLASHES, ".dart"),
    ("Elixir", _HASH, ".ex .exs"),
    ("Erlang", _PERCENT, ".erl"),
    ("Fortran", "!{}", ".f .f90 .f95"),
    ("Go", _SLASHES, ".go"),
    ("Groovy", _SLASHES, ".groovy"),
    ("HTML", "<!--{}-->", ".html .htm"),
    ("Haskell", _DASHES, ".hs"),
    ("Java", _SLASHES, ".java"),
    ("JavaScript", _SLASHES, ".js .mjs .jsx"),
    ("Julia", _HASH, ".jl"),
    ("Kotlin", _SLASHES, ".kt"),
    ("Lean", _DASHES, ".lean"),
    ("Lisp", _SEMICOLON, ".lisp"),
    ("Lua", _DASHES, ".lua"),
    ("Markdown", "<!--{}-->", ".md"),
    ("Matlab", _PERCENT, ".m"),
    ("Objective-C++", _SLASHES, ".mm"),
    ("PHP", _SLASHES, ".php"),
    ("Pascal", _SLASHES, ".pas"),
    ("Perl", _HASH, ".pl .pm"),
    ("PowerShell", _HASH, ".ps1"),
    ("Python", _HASH, ".py .pyi .pyx"),
    ("R", _HASH, ".r .R"),
    ("Ruby", _HASH, ".rb"),
    ("Rust", _SLASHES, ".rs"),
    ("SQL", _DASHES, ".sql"),
    ("Scala", _SLASHES, ".scala"),
    ("Scheme", _SEMICOLON, ".scm"),
    ("Shell", _HASH, ".sh .bash"),
    ("Solidity", _SLASHES, ".sol"),
    ("Swift", _SLASHES, ".swift"),
    ("TeX", _PERCENT, ".tex"),
    ("TypeScript", _SLASHES, ".ts .tsx"),
    ("Vue", "<!--{}-->", ".vue"),
]

# Files are looked up by suffix, JSON records by name.
LANGUAGE_TAGS: dict[str, str] = {
    suffix: comment.format(f"language: {name}") + "\n"
    for name, comment, suffixes in _LANGUAGES
    for suffix in suffixes.split()
}
_TAG_OF_NAME = {name.lower(): LANGUAGE_TAGS[suffixes.split()[0]] for name, _, suffixes in _LANGUAGES}

TEXT_SUFFIXES = (".txt", ".rst")


def language_tag(suffix_or_name: str) -> str:
    """The tag line of a file suffix (`.py`) or of a language's name (`Python`); empty when there is none."""
    return LANGUAGE_TAGS.get(suffix_or_name) or _TAG_OF_NAME.get(suffix_or_name.lower(), "")
