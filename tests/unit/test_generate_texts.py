"""A text in the making: characters of several tokens, stop texts, and reasons to end."""

import io
import sys

import torch

from megatron_lite.data.tokenizer import BytesTokenizer
from megatron_lite.generate.texts import Text, write


def text_of(prompt: str = "ab", *, count: int = 100, limit: int = 200, stop: tuple[str, ...] = ()) -> Text:
    tokenizer = BytesTokenizer()
    return Text(tokenizer, prompt, tokenizer.encode(prompt), torch.Generator(), count, limit, stop)


def printed(text: Text, new: bytes) -> list[str]:
    """What can be printed after each token."""
    found = []
    for token in new:
        text.add(token)
        found.append(text.unprinted())
    return found


def test_a_character_is_printed_when_its_last_byte_has_come():
    """Otherwise a terminal would show replacement characters in every text that is not English."""
    assert printed(text_of(), "xé漢y".encode()) == ["x", "", "é", "", "", "漢", "y"]


def test_bytes_that_form_no_character_are_printed_as_replacement_characters():
    text = text_of()
    assert "".join(printed(text, b"a\xffb")) == "a\ufffdb"
    text.add(0xE6)
    assert text.unprinted() == ""
    text.add(BytesTokenizer.eod)  # an incomplete character at the end is printed too
    assert text.unprinted() == "\ufffd" and text.finish == "eod"


def test_a_text_ends_before_a_stop_text_and_nothing_of_it_is_printed():
    text = text_of(stop=("\n\n", "END"))
    assert printed(text, b"a\nbEN") == ["a", "", "\nb", "", ""]
    assert not text.finish
    assert printed(text, b"D") == [""]
    assert (text.new, text.finish) == ("a\nb", "stop")
    other = text_of(stop=("END",))
    assert printed(other, b"ENx") == ["", "", "ENx"]


def test_a_stop_text_can_lie_across_tokens_but_not_in_the_prompt():
    text = text_of("abEN", stop=("ENDX",))
    assert printed(text, b"DX") == ["D", "X"] and not text.finish
    assert printed(text, b"ENDX") == ["", "", "", ""] and text.finish == "stop"


def test_each_reason_to_end():
    text = text_of(count=2)
    printed(text, b"x")
    assert not text.finish and text.num_new_tokens == 1
    printed(text, b"y")
    assert text.finish == "length" and text.new == "xy"
    full = text_of("abc", limit=4)
    printed(full, b"x")
    assert not full.finish
    printed(full, b"y")  # it follows four others
    assert (full.finish, full.new) == ("context", "xy")
    ended = text_of()
    ended.add(BytesTokenizer.eod)
    assert (ended.finish, ended.new, ended.num_new_tokens) == ("eod", "", 0)
    assert text_of(count=0).finish == "length"


def test_a_text_as_json():
    text = text_of(count=1)
    text.place = {"prompt_number": 2, "sample": 1}
    text.add(ord("x"))
    wanted = {"prompt": "ab", "prompt_number": 2, "sample": 1, "text": "x", "tokens": 1, "finish": "length"}
    assert text.as_json() == wanted


def test_a_reader_that_has_gone_ends_the_output_and_not_the_command(monkeypatch):
    """With `| head -1`, ranks wait for each other in the next collective; one that raised would leave the others."""

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    write("a")
    write("b")
    assert not isinstance(sys.stdout, Gone)
