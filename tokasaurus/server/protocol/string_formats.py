r"""Formats of strings in JSON schemas, as patterns of ECMA 262 that match whole texts.

The formats of JSON Schema 2020-12 follow the RFCs that it names, but allow only what common parsers accept: no leap
seconds, no year 0, and e-mail domains of at least two labels. The other formats are pydantic's. A format without a
pattern is an annotation.
"""

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"

_COUNT = r"\d{1,6}"  # 999,999 years are fewer days than pydantic's limit
_CLOCK = rf"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_CALENDAR = rf"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[A-Za-z]{{2,63}}"
_EMAIL_LENGTHS = "(?=[^@]{1,64}@)(?=.{1,254}$)"

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = r"[0-9A-Fa-f]{1,4}"


def _groups(least: int, most: int) -> str:
    """Groups of an IPv6 address."""
    if most == 0:
        return ""
    some = rf"{_GROUP}(?::{_GROUP}){{{max(least - 1, 0)},{most - 1}}}"
    return some if least else f"(?:{some})?"


_IPV6 = "|".join([_groups(8, 8), *(f"{_groups(shown, shown)}::{_groups(0, 7 - shown)}" for shown in range(8))])
_IPV6 = f"(?:{_IPV6})"
_BITS_OF_IPV4 = r"(?:[12]?\d|3[0-2])"
_BITS_OF_IPV6 = r"(?:\d\d?|1[01]\d|12[0-8])"


def _prefix(least: int, most: int) -> str:
    return f"/(?:{'|'.join(map(str, range(least, most + 1)))})"


def _ipv4_networks() -> str:
    """Addresses whose bits after the prefix are 0."""
    forms = [rf"{_IPV4}(?:/32)?", r"0\.0\.0\.0/0"]
    for bits in range(1, 32):
        num_whole, num_bits = divmod(bits, 8)
        octets = [_OCTET] * num_whole
        if num_bits:
            octets.append(f"(?:{'|'.join(str(octet) for octet in range(0, 256, 2 ** (8 - num_bits)))})")
        octets += ["0"] * (4 - len(octets))
        forms.append(r"\.".join(octets) + f"/{bits}")
    return f"(?:{'|'.join(forms)})"


_IPV4_NETWORK = _ipv4_networks()
_IPV6_NETWORK = "|".join(f"{_groups(shown, shown)}::{_prefix(16 * shown, 128)}" for shown in range(8))
_IPV6_NETWORK = f"(?:{_IPV6}(?:/128)?|{_IPV6_NETWORK})"
_IPV4_INTERFACE, _IPV6_INTERFACE = rf"{_IPV4}(?:/{_BITS_OF_IPV4})?", rf"{_IPV6}(?:/{_BITS_OF_IPV6})?"

_UNRESERVED = r"[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_PATH_CHARACTER = rf"(?:{_UNRESERVED}|[:@])"
_PORT = r"(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_AUTHORITY = rf"(?:(?:{_UNRESERVED}|:)*@)?(?:\[{_IPV6}\]|(?:{_UNRESERVED})*)(?::{_PORT})?"
_ABSOLUTE_PATH = rf"/(?:{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*)?"
_HIERARCHY = rf"(?://{_AUTHORITY}(?:/{_PATH_CHARACTER}*)*|{_ABSOLUTE_PATH})"
_SUFFIX = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{_HIERARCHY}|{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*)?{_SUFFIX}"
_RELATIVE = rf"(?:{_HIERARCHY}|(?:{_UNRESERVED}|@)+(?:/{_PATH_CHARACTER}*)*)?{_SUFFIX}"

_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_HEX = "[0-9A-Fa-f]"
_BASE64 = r"(?:{c}{{4}})*(?:{c}{{2}}==|{c}{{3}}=)?"


def _uuid(version: str) -> str:
    return rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}"


FORMATS: dict[str, str] = {
    name: f"^{pattern}$"
    for name, pattern in {
        "date": _DATE,
        "date-time": f"{_DATE}[Tt]{_TIME}",
        "time": _TIME,
        "duration": rf"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|{_COUNT}W)",
        "email": f"{_EMAIL_LENGTHS}{_EMAIL}",
        "idn-email": f"{_EMAIL_LENGTHS}{_EMAIL}",
        "name-email": f"(?=.{{1,254}}$)(?:{_EMAIL}|[A-Za-z](?:[A-Za-z ]*[A-Za-z])? <{_EMAIL}>)",
        "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
        "ipv4network": _IPV4_NETWORK,
        "ipv6network": _IPV6_NETWORK,
        "ipvanynetwork": f"(?:{_IPV4_NETWORK}|{_IPV6_NETWORK})",
        "ipv4interface": _IPV4_INTERFACE,
        "ipv6interface": _IPV6_INTERFACE,
        "ipvanyinterface": f"(?:{_IPV4_INTERFACE}|{_IPV6_INTERFACE})",
        "uuid": rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
        **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
        "uri": _URI,
        "uri-reference": f"(?:{_URI}|{_RELATIVE})",
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
        "base64": _BASE64.format(c="[A-Za-z0-9+/]"),
        "base64url": _BASE64.format(c=r"[A-Za-z0-9_\-]"),
        "fraction": r"[+-]?\d+(?:/0*[1-9]\d*)?",
    }.items()
}
