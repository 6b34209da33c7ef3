"""Change bytes of files and entries of nested descriptions at random, with a seeded generator, for `tests/app/fuzz`."""

import copy

# Sizes and counts with these numbers overflow, become negative or are far too large.
EDGES = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ODD = [None, True, -1, 0, 7, 2**40, -(2**63), 0.5, 1e308, float("nan"), float("inf"), "", "x", "[", "9" * 400]
ODD += ["relvit_tiny", "../secret", "\x1b[31m", "é\u202e\n", "os.system", "relvit.app.data.ImageData"]
ODD += [[], [[]], [1, "a"], {}, {"": None}, [None] * 50, "http://127.0.0.1:9/secret"]
ODD += [{"class_path": "os.system"}, {"class_path": "os.system", "init_args": {"command": "touch secret"}}]
# With these arguments timm's builders would load other weights.
CHOICES = {"pretrained": True, "checkpoint_path": "secret.pth", "url": "http://127.0.0.1:9/secret", "file": "secret"}
CHOICES |= {"pretrained_cfg": {"file": "secret.pth"}, "hf_hub_id": "someone/else", "cache_dir": "secret"}


def damaged(content, chance, near_start=0.2):
    """Return bytes with one to three changes, each in the first 200 bytes with probability `near_start`."""
    content = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        if not content:
            break
        start = chance.randrange(min(len(content), 200 if chance.random() < near_start else len(content)))
        part = slice(start, start + chance.choice([1, 4, 16, 64, 200]))
        size = chance.choice([1, 2, 4])
        number = chance.choice(EDGES) % 256**size
        match chance.randrange(7):
            case 0:
                content[start] ^= 1 << chance.randrange(8)
            case 1:
                content[start : start + size] = number.to_bytes(size, chance.choice(["little", "big"]))
            case 2:
                content[part] = chance.choice([b"\xff", b"\0"]) * len(content[part])
            case 3:
                del content[start:]
            case 4:
                del content[part]
            case 5:
                content[part] = content[part] * chance.choice([2, 50])
            case _:
                content[part] = chance.randbytes(len(content[part]))
    return bytes(content)


def places(value):
    """Yield the container and the key of every entry in nested dictionaries and lists."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


def foreign(value, chance):
    """Return a nested value with one to three entries removed, renamed, odd, or arguments of timm's builders."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        if not (found := list(places(value))):
            break
        holder, key = chance.choice(found)
        match chance.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chance.choice(["x", "", "class_path", f"{key}x", 0])] = holder.pop(key)
            case 2 if isinstance(holder[key], dict):
                name = chance.choice(list(CHOICES))
                holder[key][name] = copy.deepcopy(CHOICES[name])
            case _:
                holder[key] = copy.deepcopy(chance.choice(ODD))
    return value
