"""How a vector becomes the bytes of a message, one file per family."""

from prefed.codecs.interface import CODECS, Codec, CodecName, Form, Noise, Parts, codec

__all__ = ["CODECS", "Codec", "CodecName", "Form", "Noise", "Parts", "codec"]
