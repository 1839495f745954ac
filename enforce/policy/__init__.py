# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy file: read strictly (`load`), held as plain frozen values (`model`), compared with what runs (`findings`).

Nothing is imported here: `enforce.policy.model` stays standard library only for modules that only pass a policy on.
"""
