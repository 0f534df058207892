"""Backbone geometry in, side-chain fragments and torsions out.

    model = SideChains(Size(256, 3, 3, 8))
    fragments, torsions = model(backbone, present, linked, slots)

    backbone (n, L, 4, 3)   N, CA, C, O in Å         slots     (n, L, 5)      side-chain tokens, some masked
    present  (n, L, 4)      atoms in the file        fragments (n, L, 5, 16)  logits of the tokens
    linked   (n, L)         bonded to the previous   torsions  (n, L, 4, 72)  logits of the bins of chi1 … chi4

The encoder passes messages along a graph of nearest CA neighbours. Its features are distances, torsions and directions
in local frames, so the output does not depend on rotation or translation of the protein. The decoder is a transformer
over all side-chain tokens, six per residue, that also attends to the encoder's residues. A residue without CA is
padding: it is no neighbour of any residue, and no token attends to it.

Legend: n chains, L residues, T = 6·L tokens, K neighbours, D width, H heads.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import geometry
from .chemistry import BACKBONE, BEGIN, PAD, PER_RESIDUE, SLOTS, TOKENS, TORSIONS

_RADIAL, _NEAREST, _FARTHEST = 16, 2.0, 22.0
"""Radial basis functions of a distance, and where the first and the last are centred, in Å."""
_OFFSETS = 32
"""Largest offset along the chain that is told apart."""
_EDGE_FEATURES = len(BACKBONE) ** 2 * _RADIAL + 3 + 9
_NODE_FEATURES = 9
_AWAY = 1e6
_PERIOD = 10_000.0


class Size(NamedTuple):
    width: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    neighbours: int = 30
    dropout: float = 0.0


class Geometry(NamedTuple):
    """The encoder's input features."""

    nodes: Tensor
    """(n, L, 9): sine and cosine of phi, psi and omega, and which of them exist."""
    neighbours: Tensor
    """(n, L, K) int64: the numbers of the neighbours."""
    real: Tensor
    """(n, L, K) bool: whether the edge exists."""
    edges: Tensor
    """(n, L, K, features)"""
    offsets: Tensor
    """(n, L, K) int64: offset along the chain, from 0; the last number is for another unbroken segment."""


def describe(backbone: Tensor, present: Tensor, linked: Tensor, neighbours: int) -> Geometry:
    """Return features that are invariant to rotation and translation."""
    n, length = linked.shape
    residues = present[..., 1]
    alpha = backbone[..., 1, :]
    distance = (alpha[:, :, None] - alpha[:, None]).square().sum(-1)
    distance = torch.where(residues[:, None] & residues[..., None], distance, _AWAY * _AWAY)
    nearest, chosen = distance.topk(min(neighbours, length), dim=-1, largest=False)
    real = nearest < _AWAY
    frames = geometry.frames(backbone[..., 0, :], alpha, backbone[..., 2, :])
    frames = frames * present[..., :3].all(-1)[..., None, None]
    segment = (~linked).cumsum(1)
    position = torch.arange(length, device=linked.device).expand(n, -1)
    offset = (_pick(position, chosen) - position[..., None]).clamp(-_OFFSETS, _OFFSETS) + _OFFSETS
    offset = torch.where(_pick(segment, chosen) == segment[..., None], offset, 2 * _OFFSETS + 1)
    edges = _edge_features(backbone, present, frames, chosen) * real[..., None]
    return Geometry(_node_features(backbone, present, linked), chosen, real, edges, offset)


def _pick(values: Tensor, chosen: Tensor) -> Tensor:
    """values (n, L, ...) of the neighbours: (n, L, K, ...)."""
    n, length, count = chosen.shape
    flat = chosen.reshape(n, length * count, *[1] * (values.ndim - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, flat).unflatten(1, (length, count))


def backbone_torsions(backbone: Tensor, present: Tensor, linked: Tensor) -> tuple[Tensor, Tensor]:
    """phi, psi and omega (n, L, 3), and which of them exist; none across a chain break."""
    n, ca, c = backbone[..., :3, :].unbind(-2)
    has_n, has_ca, has_c = present[..., :3].unbind(-1)
    bond = linked[:, 1:]
    phi = geometry.torsion(c[:, :-1], n[:, 1:], ca[:, 1:], c[:, 1:])
    psi = geometry.torsion(n[:, :-1], ca[:, :-1], c[:, :-1], n[:, 1:])
    omega = geometry.torsion(ca[:, :-1], c[:, :-1], n[:, 1:], ca[:, 1:])
    has_phi = bond & has_c[:, :-1] & has_n[:, 1:] & has_ca[:, 1:] & has_c[:, 1:]
    has_psi = bond & has_n[:, :-1] & has_ca[:, :-1] & has_c[:, :-1] & has_n[:, 1:]
    has_omega = bond & has_ca[:, :-1] & has_c[:, :-1] & has_n[:, 1:] & has_ca[:, 1:]
    angles = torch.stack([F.pad(phi, (1, 0)), F.pad(psi, (0, 1)), F.pad(omega, (1, 0))], dim=-1)
    has = torch.stack([F.pad(has_phi, (1, 0)), F.pad(has_psi, (0, 1)), F.pad(has_omega, (1, 0))], dim=-1)
    return angles, has


def _node_features(backbone: Tensor, present: Tensor, linked: Tensor) -> Tensor:
    angles, has = backbone_torsions(backbone, present, linked)
    return torch.cat([angles.sin() * has, angles.cos() * has, has.to(angles.dtype)], dim=-1)


def _edge_features(backbone: Tensor, present: Tensor, frames: Tensor, chosen: Tensor) -> Tensor:
    """(n, L, K, 268): distances between all backbone atoms of the two, direction and orientation of the neighbour."""
    other = _pick(backbone, chosen)  # (n, L, K, 4, 3)
    both = present[:, :, None, :, None] & _pick(present, chosen)[..., None, :]  # (n, L, K, 4, 4)
    distance = (backbone[:, :, None, :, None] - other[..., None, :, :]).square().sum(-1).sqrt()
    centres = torch.linspace(_NEAREST, _FARTHEST, _RADIAL, dtype=backbone.dtype, device=backbone.device)
    width = (_FARTHEST - _NEAREST) / _RADIAL
    radial = torch.exp(-(((distance[..., None] - centres) / width) ** 2)) * both[..., None]
    away = geometry.unit(other[..., 1, :] - backbone[:, :, None, 1])
    direction = geometry.dot(frames[:, :, None], away[..., None, :])  # in the residue's own frame
    turned = geometry.dot(frames[:, :, None, :, None], _pick(frames, chosen)[..., None, :, :])
    return torch.cat([radial.flatten(-3), direction, turned.flatten(-2)], dim=-1)


class MessageLayer(nn.Module):
    """Message passing: each residue gets the mean over messages from its neighbours and their edges."""

    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # One linear map of (own, neighbour, edge), split into three: each residue is mapped once, not K times.
        self.own = nn.Linear(width, width)
        self.neighbour = nn.Linear(width, width, bias=False)
        self.edge = nn.Linear(width, width, bias=False)
        self.message = nn.Linear(width, width)
        self.update = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, nodes: Tensor, edges: Tensor, features: Geometry) -> Tensor:
        x = self.norm1(nodes)
        messages = F.gelu(self.own(x)[:, :, None] + _pick(self.neighbour(x), features.neighbours) + self.edge(edges))
        # The last map is linear, so it may follow the mean.
        count = features.real.sum(-1, keepdim=True).clamp(min=1)
        mean = (messages * features.real[..., None]).sum(2) / count
        nodes = nodes + self.dropout(self.message(mean))
        return nodes + self.dropout(self.update(self.norm2(nodes)))


class Encoder(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.neighbours = size.neighbours
        self.nodes = nn.Linear(_NODE_FEATURES, size.width)
        self.edges = nn.Linear(_EDGE_FEATURES, size.width)
        self.offsets = nn.Embedding(2 * _OFFSETS + 2, size.width)
        self.edge_norm = nn.LayerNorm(size.width)
        self.layers = nn.ModuleList(MessageLayer(size) for _ in range(size.encoder_layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, backbone: Tensor, present: Tensor, linked: Tensor) -> Tensor:
        features = describe(backbone, present, linked, self.neighbours)
        nodes = self.nodes(features.nodes)
        edges = self.edge_norm(self.edges(features.edges) + self.offsets(features.offsets))
        for layer in self.layers:
            nodes = layer(nodes, edges, features)
        return self.norm(nodes)


class Attention(nn.Module):
    """Attention of tokens (n, T, D) to sources (n, S, D); `mask` (n, S) is False for padding."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.drop = size.heads, size.dropout
        self.query = nn.Linear(size.width, size.width)
        self.key_value = nn.Linear(size.width, 2 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, tokens: Tensor, sources: Tensor, mask: Tensor) -> Tensor:
        q = self.query(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(sources).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        drop = self.drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], dropout_p=drop)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.among, self.towards = Attention(size), Attention(size)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, tokens: Tensor, token_mask: Tensor, residues: Tensor, residue_mask: Tensor) -> Tensor:
        x = self.norm1(tokens)
        tokens = tokens + self.dropout(self.among(x, x, token_mask))
        tokens = tokens + self.dropout(self.towards(self.norm2(tokens), residues, residue_mask))
        return tokens + self.dropout(self.mlp(self.norm3(tokens)))


def positions(length: int, width: int, like: Tensor) -> Tensor:
    """(length, width): sines and cosines of the position in the chain."""
    rate = torch.exp(-math.log(_PERIOD) * torch.arange(width // 2, dtype=like.dtype, device=like.device) / (width // 2))
    angle = torch.arange(length, dtype=like.dtype, device=like.device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Decoder(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.token = nn.Embedding(len(TOKENS), size.width)
        self.slot = nn.Embedding(PER_RESIDUE, size.width)
        self.layers = nn.ModuleList(DecoderLayer(size) for _ in range(size.decoder_layers))
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.token, self.slot):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, residues: Tensor, real: Tensor, slots: Tensor) -> Tensor:
        """(n, L, 6, D): the first of each six is the residue, the others are its slots."""
        length, width = residues.shape[1:]
        begin = torch.where(real, BEGIN, PAD)[..., None]
        token = torch.cat([begin, slots], dim=-1)
        placed = residues + positions(length, width, residues)
        tokens = (self.token(token) + self.slot.weight + placed[:, :, None]).flatten(1, 2)
        mask = (token != PAD).flatten(1)
        for layer in self.layers:
            tokens = layer(tokens, mask, placed, real)
        return self.norm(tokens).unflatten(1, (length, PER_RESIDUE))


class SideChains(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.encoder, self.decoder = Encoder(size), Decoder(size)
        self.fragments = nn.Linear(size.width, len(TOKENS))
        self.torsions = nn.Linear(size.width, TORSIONS * geometry.BINS)

    def forward(self, backbone: Tensor, present: Tensor, linked: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        residues = self.encoder(backbone, present, linked)
        states = self.decoder(residues, present[..., 1], slots)
        assert states.shape[2] == 1 + SLOTS
        return self.fragments(states[:, :, 1:]), self.torsions(states[:, :, 0]).unflatten(-1, (TORSIONS, geometry.BINS))
