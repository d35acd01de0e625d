"""What is remembered in process stays bounded."""

from __future__ import annotations

from contextguard_adk.memory import MAX_REMEMBERED, BoundedDict, CallInFlight, Memory


def test_oldest_entry_is_forgotten() -> None:
    """A full dict forgets what was put first."""
    remembered: BoundedDict[str, int] = BoundedDict(2)
    for number, key in enumerate("abc"):
        remembered.put(key, number)
    assert len(remembered) == 2
    assert [remembered.get(key) for key in "abc"] == [None, 1, 2]


def test_entry_that_is_put_again_is_the_newest() -> None:
    """Putting a key again keeps it, with its new value."""
    remembered: BoundedDict[str, int] = BoundedDict(2)
    for number, key in enumerate("abac"):
        remembered.put(key, number)
    assert [remembered.get(key) for key in "abc"] == [2, None, 3]


def test_reading_does_not_keep_an_entry() -> None:
    """Only putting makes an entry the newest."""
    remembered: BoundedDict[str, int] = BoundedDict(2)
    remembered.put("a", 1)
    remembered.put("b", 2)
    remembered.get("a")
    remembered.put("c", 3)
    assert remembered.get("a") is None


def test_entry_is_popped_once() -> None:
    """What was popped is gone."""
    remembered: BoundedDict[str, int] = BoundedDict()
    remembered.put("a", 1)
    assert remembered.pop("a") == 1
    assert remembered.pop("a") is None
    assert len(remembered) == 0


def test_entries_are_popped_by_key() -> None:
    """Every entry whose key is wanted is returned and forgotten, and no other."""
    remembered: BoundedDict[tuple[str, str], int] = BoundedDict()
    for number, key in enumerate(["ax", "bx", "ay"]):
        remembered.put((key[0], key[1]), number)
    popped = remembered.pop_where(lambda key: key[0] == "a")
    assert popped == [(("a", "x"), 0), (("a", "y"), 2)]
    assert len(remembered) == 1
    assert remembered.pop_where(lambda key: key[0] == "a") == []


def test_memory_of_a_plugin_is_bounded_and_its_own() -> None:
    """Two plugins share nothing, and none remembers endlessly many calls."""
    memory, other = Memory(), Memory()
    for number in range(MAX_REMEMBERED + 5):
        memory.calls.put((str(number), "", "", ""), CallInFlight(1, 1, 1))
    assert len(memory.calls) == MAX_REMEMBERED
    assert len(other.calls) == 0
