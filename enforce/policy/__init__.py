# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy file: read strictly (`load`), held as plain frozen values (`model`), explained (`reference`).

Nothing is imported here: `enforce.policy.model` stays standard library only for those who just carry a policy around.
"""
