"""CRC-32 of bytes: that of zlib-ng, which keeps up with a fast disk, or where it is missing that of Python's zlib."""

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32
