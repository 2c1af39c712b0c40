"""Rotations as unit quaternions (w x y z) and rotation vectors, batched and differentiable.

All functions take any leading batch shape. ``quat`` maps vectors of the base frame to the world frame.
"""

import torch
from torch import Tensor

__all__ = [
    "canonical",
    "quat_conjugate",
    "quat_multiply",
    "quat_to_matrix",
    "quat_to_rotvec",
    "rotate",
    "rotate_inverse",
    "rotvec_to_quat",
]

_SMALL = 1e-6  # [rad]; below it the series are exact to float64 rounding


def quat_to_matrix(quat: Tensor) -> Tensor:
    """Rotation matrices, shape (..., 3, 3), of unit quaternions w x y z, shape (..., 4)."""
    w, x, y, z = quat.unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def quat_multiply(left: Tensor, right: Tensor) -> Tensor:
    """Hamilton product of quaternions w x y z, shapes (..., 4)."""
    aw, ax, ay, az = left.unbind(-1)
    bw, bx, by, bz = right.unbind(-1)
    return torch.stack(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ],
        -1,
    )


def quat_conjugate(quat: Tensor) -> Tensor:
    """Inverse of a unit quaternion, shape (..., 4)."""
    return torch.cat([quat[..., :1], -quat[..., 1:]], -1)


def canonical(quat: Tensor) -> Tensor:
    """The sign of the double cover with w >= 0, shape (..., 4)."""
    return torch.where(quat[..., :1] < 0, -quat, quat)


def quat_to_rotvec(quat: Tensor) -> Tensor:
    """Rotation vector [rad], shape (..., 3), of the shorter way round; finite gradients at identity."""
    quat = canonical(quat)
    vector = quat[..., 1:]
    squared = (vector * vector).sum(-1, keepdim=True)
    small = squared < _SMALL**2
    # The guarded square root keeps the gradient of the branch that is not taken finite.
    sine = torch.where(small, torch.ones_like(squared), squared).sqrt()
    angle = 2 * torch.atan2(sine, quat[..., :1])
    scale = torch.where(small, 2 / quat[..., :1].clamp_min(0.5), angle / sine)
    return vector * scale


def rotvec_to_quat(rotvec: Tensor) -> Tensor:
    """Unit quaternion w x y z, shape (..., 4), of a rotation vector [rad], shape (..., 3)."""
    squared = (rotvec * rotvec).sum(-1, keepdim=True)
    small = squared < _SMALL**2
    angle = torch.where(small, torch.ones_like(squared), squared).sqrt()
    sine = torch.where(small, 0.5 - squared / 48, torch.sin(angle / 2) / angle)
    cosine = torch.where(small, 1 - squared / 8, torch.cos(angle / 2))
    return torch.cat([cosine, rotvec * sine], -1)


def rotate(quat: Tensor, vector: Tensor) -> Tensor:
    """Vectors of the base frame, shape (..., 3), in the world frame."""
    axis, w = quat[..., 1:], quat[..., :1]
    twice = 2 * torch.linalg.cross(axis, vector)
    return vector + w * twice + torch.linalg.cross(axis, twice)


def rotate_inverse(quat: Tensor, vector: Tensor) -> Tensor:
    """Vectors of the world frame, shape (..., 3), in the base frame."""
    axis, w = quat[..., 1:], quat[..., :1]
    twice = 2 * torch.linalg.cross(axis, vector)
    return vector - w * twice + torch.linalg.cross(axis, twice)
